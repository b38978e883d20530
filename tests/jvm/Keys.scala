package ags.peers

import java.security.SecureRandom
import java.util.Base64
import javax.crypto.Cipher
import javax.crypto.spec.{GCMParameterSpec, SecretKeySpec}

import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path
import org.apache.parquet.crypto._
import org.apache.parquet.crypto.keytools.KmsClient
import org.apache.parquet.hadoop.api.WriteSupport.WriteContext
import org.apache.parquet.hadoop.metadata.ColumnPath

/** A KMS whose master keys are in the Hadoop configuration: "id:base64,id:base64". As in parquet's own InMemoryKMS, what
  * it wraps is base64 of nonce (12 bytes), ciphertext and tag (16), and the AAD is the id of the master key.
  */
class MemoryKms extends KmsClient {
  private var masterKeys = Map.empty[String, Array[Byte]]

  override def initialize(conf: Configuration, instanceId: String, instanceUrl: String, token: String): Unit =
    masterKeys = conf
      .getTrimmedStrings(MemoryKms.MasterKeys)
      .map { entry =>
        val (id, key) = entry.splitAt(entry.indexOf(':'))
        id -> Base64.getDecoder.decode(key.tail)
      }
      .toMap

  override def wrapKey(key: Array[Byte], masterKeyId: String): String = {
    val nonce = new Array[Byte](12)
    MemoryKms.random.nextBytes(nonce)
    Base64.getEncoder.encodeToString(nonce ++ cipher(Cipher.ENCRYPT_MODE, masterKeyId, nonce).doFinal(key))
  }

  override def unwrapKey(wrapped: String, masterKeyId: String): Array[Byte] = {
    val (nonce, sealedKey) = Base64.getDecoder.decode(wrapped).splitAt(12)
    cipher(Cipher.DECRYPT_MODE, masterKeyId, nonce).doFinal(sealedKey)
  }

  private def cipher(mode: Int, masterKeyId: String, nonce: Array[Byte]): Cipher = {
    val key = masterKeys.getOrElse(masterKeyId, throw new KeyAccessDeniedException(s"no master key $masterKeyId"))
    val gcm = Cipher.getInstance("AES/GCM/NoPadding")
    gcm.init(mode, new SecretKeySpec(key, "AES"), new GCMParameterSpec(128, nonce))
    gcm.updateAAD(masterKeyId.getBytes("UTF-8"))
    gcm
  }
}

object MemoryKms {
  val MasterKeys = "ags.peers.master.keys"
  private val random = new SecureRandom
}

/** Keys as they are, from a JSON object in the Hadoop configuration; parquet_peers.PmeKeys says what is in it. */
class ExplicitKeys extends EncryptionPropertiesFactory with DecryptionPropertiesFactory {

  override def getFileEncryptionProperties(
      conf: Configuration,
      path: Path,
      context: WriteContext
  ): FileEncryptionProperties = {
    val keys = ExplicitKeys.parse(conf)
    val builder = FileEncryptionProperties
      .builder(keys.required("footer").binaryValue)
      .withAlgorithm(ParquetCipher.valueOf(keys.required("algorithm").textValue))
    if (keys.hasNonNull("footer_metadata")) builder.withFooterKeyMetadata(keys.get("footer_metadata").binaryValue)
    if (keys.required("plaintext_footer").booleanValue) builder.withPlaintextFooter()
    if (keys.hasNonNull("aad_prefix")) {
      builder.withAADPrefix(keys.get("aad_prefix").binaryValue)
      if (!keys.required("store_aad_prefix").booleanValue) builder.withoutAADPrefixStorage()
    }
    val columns = ExplicitKeys.columns(keys).map { case (name, column) =>
      val one = ColumnEncryptionProperties.builder(name)
      if (column.hasNonNull("key")) one.withKey(column.get("key").binaryValue) // none: the footer key
      if (column.hasNonNull("metadata")) one.withKeyMetaData(column.get("metadata").binaryValue)
      name -> one.build()
    }
    if (columns.nonEmpty) {
      builder.withEncryptedColumns(columns.asJava)
      if (keys.required("complete").booleanValue) builder.withCompleteColumnEncryption()
    }
    builder.build()
  }

  override def getFileDecryptionProperties(conf: Configuration, path: Path): FileDecryptionProperties = {
    val keys = ExplicitKeys.parse(conf)
    val builder = FileDecryptionProperties.builder().withFooterKey(keys.required("footer").binaryValue)
    if (keys.hasNonNull("aad_prefix")) builder.withAADPrefix(keys.get("aad_prefix").binaryValue)
    val columns = ExplicitKeys.columns(keys).collect {
      case (name, column) if column.hasNonNull("key") =>
        name -> ColumnDecryptionProperties.builder(name).withKey(column.get("key").binaryValue).build()
    }
    if (columns.nonEmpty) builder.withColumnKeys(columns.asJava)
    builder.build()
  }
}

object ExplicitKeys {
  val Json = "ags.peers.keys"
  private val mapper = new ObjectMapper

  def parse(conf: Configuration): JsonNode = mapper.readTree(conf.getRaw(Json))

  def columns(keys: JsonNode): Map[ColumnPath, JsonNode] =
    keys.required("columns").asScala.map { column =>
      ColumnPath.get(column.required("path").asScala.map(_.textValue).toSeq: _*) -> column
    }.toMap
}
